"""Make a run fit: `fit` finds the cheapest changes, `arrange` orders them, `twin` shrinks a run to a card."""
