#compdef NAMES
_idlm() {
    local name=${words[1]:t} found=
    if [[ $name == idlm ]]; then
        name=idlm-
        (( CURRENT > 2 )) && name=idlm-${words[2]}
    fi
    case $name in
CASES
    esac
    local -a all=(${=found})
    compadd -S '' -- ${(M)all:#*=}
    compadd -- ${all:#*=}
    if [[ $PREFIX == *=* ]]; then compset -P '*='; _files; fi
}
compdef _idlm NAMES
