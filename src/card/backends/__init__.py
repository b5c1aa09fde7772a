"""Models that run through the modules of other libraries, also on GPUs."""
