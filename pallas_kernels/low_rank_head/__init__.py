"""DLite's sequential head for a whole block of drafts: recurrence, low-rank logits and the choice, in one call."""
