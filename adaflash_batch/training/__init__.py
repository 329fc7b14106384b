"""Training a drafter from nothing: decode, train, evaluate, publish."""
