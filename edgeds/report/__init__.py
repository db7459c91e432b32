"""What came out: speed, accuracy, and the facts that make the figures comparable."""
