"""`headrace fit`: predictors of expert picks, learnt from route traces."""
