"""Replays of request traces through the tree and the tiers, without copying bytes. `docs/replay.md` has the rules."""
