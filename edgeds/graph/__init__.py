"""What the model is: load and save, views, folding, shapes, opsets, cost and lint. Workstation half."""
