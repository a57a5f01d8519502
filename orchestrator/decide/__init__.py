"""The pure core: observations are assessed, then the first rule that matches decides. No I/O."""
