"""Loop IR: what one element of a value is, as a scalar term over loop variables."""
