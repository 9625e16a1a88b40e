"""Weights of real models from trainers to ranks that serve, as WeightSync moves them and as others do."""
