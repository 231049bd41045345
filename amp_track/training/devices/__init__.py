"""One module for each kind of device: its memory, its budget, its meter. `open` chooses between them."""
