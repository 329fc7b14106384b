"""Device operations, each beside its PyTorch reference; installed as `adaflash_batch.kernels`."""
