"""The version of the package, apart from its names, which a job's process does not import."""

__version__ = "0.1.0"
