"""What becomes of a command when something goes wrong: faults in real processes, and the stores read afterwards."""
