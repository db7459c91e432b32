"""Ready-made pipelines: sources in, results out."""
