"""Reading and writing checkpoints: containers, and the names that parameters have in them."""
