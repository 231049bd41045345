"""What was asked for: the job, the options of each command, and the flags made from them."""
