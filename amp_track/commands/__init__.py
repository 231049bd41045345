"""One module for each command, from a request to a result; `session` is what they share."""
