"""Input files to prompts, completions to output files."""
