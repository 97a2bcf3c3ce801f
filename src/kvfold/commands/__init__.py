"""The commands of ``kvfold``, one file each; :mod:`kvfold.cli` mounts them."""
