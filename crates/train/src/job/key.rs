//! A key of a table: its type, the place in the job that it fills, and words about it.

use super::cursor::At;
use super::shape::Shape;
use super::tree::Value;
use super::types::Type;

/// A key of a table.
pub(super) struct Key<S> {
    pub(super) name: &'static str,
    pub(super) words: &'static str,
    /// What the page says under "default", in place of the value that the kind starts from.
    pub(super) default: Option<&'static str>,
    /// What to do if the key is missing; none: it may be left out.
    pub(super) needed: Option<&'static str>,
    /// A key that cannot be there together with this one.
    pub(super) instead_of: Option<&'static str>,
    pub(super) shape: Shape,
    applies: fn(&mut S) -> bool,
    pub(super) access: Box<dyn Access<S> + Send + Sync>,
}

/// How a key's value gets into an `S` and out of it.
pub(super) trait Access<S> {
    fn has(&self, spec: &mut S) -> bool;
    fn read(&self, spec: &mut S, at: &At);
    fn write(&self, spec: &mut S) -> Option<Value>;
}

struct Field<S, T> {
    of: Type<T>,
    field: fn(&mut S) -> Option<&mut T>,
}

impl<S, T> Access<S> for Field<S, T> {
    fn has(&self, spec: &mut S) -> bool {
        (self.field)(spec).is_some()
    }
    fn read(&self, spec: &mut S, at: &At) {
        if let (Some(value), Some(field)) = ((self.of.read)(at), (self.field)(spec)) {
            *field = value;
        }
    }
    fn write(&self, spec: &mut S) -> Option<Value> {
        (self.field)(spec).and_then(|value| (self.of.write)(value))
    }
}

struct Property<S, T> {
    of: Type<T>,
    get: fn(&S) -> Option<T>,
    set: fn(&mut S, T),
}

impl<S, T> Access<S> for Property<S, T> {
    fn has(&self, _: &mut S) -> bool {
        true
    }
    fn read(&self, spec: &mut S, at: &At) {
        if let Some(value) = (self.of.read)(at) {
            (self.set)(spec, value);
        }
    }
    fn write(&self, spec: &mut S) -> Option<Value> {
        (self.get)(spec).and_then(|value| (self.of.write)(&value))
    }
}

impl<S: 'static> Key<S> {
    /// A key that is a field, for the kinds that have the field.
    pub(super) fn field<T: 'static>(
        name: &'static str,
        of: Type<T>,
        field: fn(&mut S) -> Option<&mut T>,
    ) -> Key<S> {
        Key::new(name, of.shape.clone(), Field { of, field })
    }

    /// A key that is no field by itself, for all kinds.
    pub(super) fn property<T: 'static>(
        name: &'static str,
        of: Type<T>,
        get: fn(&S) -> Option<T>,
        set: fn(&mut S, T),
    ) -> Key<S> {
        Key::new(name, of.shape.clone(), Property { of, get, set })
    }

    fn new(name: &'static str, shape: Shape, access: impl Access<S> + Send + Sync + 'static) -> Key<S> {
        let access = Box::new(access);
        Key {
            name,
            words: "",
            default: None,
            needed: None,
            instead_of: None,
            shape,
            applies: |_| true,
            access,
        }
    }

    /// What the page says about it.
    pub(super) fn words(self, words: &'static str) -> Key<S> {
        Key { words, ..self }
    }

    /// The key must be there; `hint` says what to write.
    pub(super) fn needed(self, hint: &'static str) -> Key<S> {
        Key { needed: Some(hint), ..self }
    }

    /// What the page says under "default", where the value itself would not.
    pub(super) fn or(self, words: &'static str) -> Key<S> {
        Key { default: Some(words), ..self }
    }

    /// Not together with another key. An override of one of them replaces the other one of the file.
    pub(super) fn instead_of(self, other: &'static str) -> Key<S> {
        Key { instead_of: Some(other), ..self }
    }

    /// Only for kinds that start from such a value.
    pub(super) fn only(self, applies: fn(&mut S) -> bool) -> Key<S> {
        Key { applies, ..self }
    }

    /// Whether a kind that starts from such a value has the key.
    pub(super) fn is_of(&self, spec: &mut S) -> bool {
        (self.applies)(spec) && self.access.has(spec)
    }
}
