"""Media of requests before the model: fetching, the media processes, and the service with both."""
