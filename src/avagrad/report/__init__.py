"""What people look at: figures from records. Numbers are worked out in one module, and drawn in another."""
