"""From a model to a bundle: the jobs that need both halves (graph and compress, pipelines and reports)."""
