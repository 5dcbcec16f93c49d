"""Lightning callbacks: reports, progress bar, checkpoints."""
