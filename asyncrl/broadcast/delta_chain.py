"""Which deltas are kept and which a subscriber fetches, decided purely. (Being written.)"""
