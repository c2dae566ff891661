"""The model that is trained: log-probs, its optimizer, critic, reference, and what saves memory."""
