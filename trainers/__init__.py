"""Credit, losses and the training loop: one idea a file. Knows trees and engines, and nothing of sandboxes."""
