# Turns the headers' plain comments into Doxygen's: a comment documents the next declaration, one at
# the end of a line documents that line, and the first comment documents the file. Also omits the
# inline namespace that versions the ABI, because users never write it.
1s|^// |/// @file\n/// |
s|^( *)//( \|$)|\1///\2|
s|([^ ] +)// |\1///< |
s|pycollect::inline PYCOLLECT_ABI|pycollect|
