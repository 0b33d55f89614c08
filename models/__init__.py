"""Models the project makes for itself: a trained one, built ones and torch-exported ones. See README.md."""
