"""One token of each of a few sequences: steps in few launches, for which reading the weights is the floor."""
