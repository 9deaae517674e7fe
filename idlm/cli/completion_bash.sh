_idlm() {
    local typed=${COMP_LINE:0:COMP_POINT} name=${COMP_WORDS[0]##*/} found=
    typed=${typed##*[[:space:]]}
    if [[ $name == idlm ]]; then
        name=idlm-
        ((COMP_CWORD > 1)) && name=idlm-${COMP_WORDS[1]}
    fi
    case $name in
CASES
    esac
    COMPREPLY=($(compgen -W "$found" -- "$typed"))
    # Bash completes only what follows the last equals sign.
    if [[ $typed == *=* ]]; then COMPREPLY=("${COMPREPLY[@]#"${typed%"${typed##*=}"}"}"); fi
    if [[ ${COMPREPLY[0]} == *= ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -o default -F _idlm NAMES
