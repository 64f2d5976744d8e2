"""Replays of request traces through the tree and the tiers, without moving bytes. Rules: `docs/replay.md`."""
