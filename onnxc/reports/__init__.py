"""Reports that people look at: HTML pages of `explain`, `profile` and `compare`, and traces for Perfetto."""
