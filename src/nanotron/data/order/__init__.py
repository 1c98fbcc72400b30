"""Which sample comes next: a pure function of the seed and the sample's index, on every layout."""
