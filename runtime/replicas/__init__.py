"""Several engines behind one address: routing of requests, and their transport to a replica."""
