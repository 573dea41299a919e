"""Oracles: which backend and which experts class run a layer, and how its weights are converted for them."""
