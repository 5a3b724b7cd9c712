"""Routes for operators, metrics, the page and the API's description."""
