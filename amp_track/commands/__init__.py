"""One module per command: from a request to a result. They share `session`."""
