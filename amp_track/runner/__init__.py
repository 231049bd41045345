"""The job runner: it runs each job in fresh processes."""
