"""The decoder: target model, KV pages, scheduler, sampling, acceptance."""
