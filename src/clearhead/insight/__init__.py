"""Looking inside any PyTorch model: its attention, what it adds up to, and what follows when it is changed."""
