"""Commands that look at inputs and at outputs: check, status, verify, merge."""
