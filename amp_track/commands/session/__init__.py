"""What the commands share: preparing, opening studies, running a tracked job, and saying what failed."""
