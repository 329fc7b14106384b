"""The block-diffusion drafter and its checkpoints."""
