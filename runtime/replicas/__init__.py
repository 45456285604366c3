"""Several engines behind one address: who gets a request, and how it is carried there and back."""
