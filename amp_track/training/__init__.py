"""Everything that runs inside a job's process."""
