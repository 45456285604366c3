"""What operators see and set: API keys, the record of each request, metrics, logs and traces."""
