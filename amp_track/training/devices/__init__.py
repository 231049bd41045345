"""One module for each kind of device: its memory, its budget, its meter. `opening` chooses between them."""
