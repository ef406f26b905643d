# %% [markdown]
# # A notebook

# %%
print(1)
