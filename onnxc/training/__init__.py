"""Training: forward, loss, backward and the optimizer's update as one compiled program."""
