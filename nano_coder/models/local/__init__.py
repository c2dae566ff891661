"""Models whose weights are in this process: engine, scheduler, sampler and decoding."""
