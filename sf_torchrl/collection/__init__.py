"""Parts of the collector: arguments, running, weights, batches handed over."""
