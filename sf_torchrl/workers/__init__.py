"""The processes: env workers, the inference worker, and their supervisor."""
