"""How rollout, training and publishing are scheduled."""
